"""Tasks, models and data that the project makes by itself, so that everything can be tried offline."""
