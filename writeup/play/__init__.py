"""The part of the page that a reader can operate: numbers that Python computed, and the script that shows them."""
