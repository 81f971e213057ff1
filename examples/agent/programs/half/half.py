"""Halves numbers."""


def half(number):
    return number / 3
