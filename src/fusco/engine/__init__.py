"""The engine (FUSCO's dComm) executes plans. ``base`` is what every backend offers, the rest what backends share."""
