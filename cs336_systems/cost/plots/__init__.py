"""The model's predictions where people would rather look: one file a picture, its numbers apart from its drawing.

The numbers need no matplotlib; the drawings take it from the optional extra `writeup`.
"""
