"""Pictures of the model's predictions: one file for each, with its numbers apart from its drawing.

The numbers need no matplotlib; the drawings take it from the optional extra `writeup`.
"""
