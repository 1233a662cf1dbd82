import os

# What starts is compiled, as what pip has installed is.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
