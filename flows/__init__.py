"""What runs, in order."""
