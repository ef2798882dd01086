"""Properties that hold for every method and every credit rule, as plain functions that raise one sentence.

`granular check-method FILE` runs them on a file of one's own, the project's tests on every method of the package.
"""
