"""What runs in worker processes: the actor that takes commands, streams, operators, collectives."""
