"""MQTT session, in-memory broker, resumable block transfer, embedded broker."""
