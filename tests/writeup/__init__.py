"""Tests of writeup/."""
