"""This computer: its console, its devices and memory, text from elsewhere."""
