"""Reports for people: tables and plots, as Markdown and as one HTML file that needs nothing else.

Start with document.py (what a report consists of), then html.py and markdown.py (how it is written). plots.py draws
with matplotlib, which is imported only for a plot. Imports only the base modules.
"""
