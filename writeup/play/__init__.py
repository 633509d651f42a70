"""The interactive part of the page: numbers that Python computed, and the script that shows them."""
