"""Rules for operators and loops at symbolic sizes."""
