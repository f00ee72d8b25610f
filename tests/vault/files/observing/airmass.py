"""How much air a star's light passes, and how much of it gets lost."""
import math


def airmass(altitude_degrees):
    "Relative path through the air; 1 at the zenith (Kasten and Young 1989)."
    h = altitude_degrees
    return 1 / (math.sin(math.radians(h)) + 0.50572 * (h + 6.07995) ** -1.6364)


def extinction(magnitude, altitude_degrees, coefficient=0.21):
    "The magnitude above the atmosphere of a star seen at this altitude."
    return magnitude - coefficient * airmass(altitude_degrees)
