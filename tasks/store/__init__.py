"""The artifacts: where they are, how they are made, kept, checked, moved and opened."""
