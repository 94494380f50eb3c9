"""The processes of a job in a checkout: `python -m workers.maker RECIPE`."""
