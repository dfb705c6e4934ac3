"""What people read: reports, model cards, plots and comparisons."""
