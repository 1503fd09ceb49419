"""Reports for people: curves of a training run as pages and pictures."""
