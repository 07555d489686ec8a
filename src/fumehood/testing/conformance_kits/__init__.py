"""Conformance tests of the seams in `fumehood.interfaces`. Import the modules; docs/testing.md lists them."""
