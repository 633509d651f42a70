"""The write-up: chapters that are filled from records, as one HTML page and one PDF."""
