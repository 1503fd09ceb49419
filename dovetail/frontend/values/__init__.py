"""Where values came from, and the guards that reading them needs."""
