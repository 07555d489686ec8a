"""Conformance tests of the seams."""
