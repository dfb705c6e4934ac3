"""Recipes and studies: named sets of parameters, and lists of runs with them."""
