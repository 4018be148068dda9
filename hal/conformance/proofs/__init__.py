"""The proofs, a file a subject: each takes a `hal.conformance.proofs.run.Run` and says what came of it.

A proof never trusts a call that does nothing: a case whose contract names no element runs a control
beside it that names some.
"""
