"""Telemetry: spans and meters that cost nothing when nobody listens."""
