"""What is kept on disk: the format of artefacts."""
