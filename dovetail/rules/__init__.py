"""Knowledge about single functions and libraries, one file a topic; the core works without it."""
