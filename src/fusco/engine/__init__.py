"""The engine (FUSCO's dComm): executes plans. ``cpu`` is its CPU backend; ``base`` is what every backend offers."""
