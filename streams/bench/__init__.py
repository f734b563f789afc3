"""What all benches share: one report form, taking turns, the machine, the screen."""
