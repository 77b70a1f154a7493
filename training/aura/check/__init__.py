"""Can these machines train together, and how loaded are they?"""
