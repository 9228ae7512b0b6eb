"""What every service needs in order to run: settings, Kafka clients, logs, metrics, traces and a clean stop.

Knows no component. A component's edge imports from here; a core never does.
"""
