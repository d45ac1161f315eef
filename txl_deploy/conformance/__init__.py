"""Whether a runtime, in whatever language, does what the conformance list says; its README has the protocol."""
