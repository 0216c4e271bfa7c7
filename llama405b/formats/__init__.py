"""The forms that training data comes in; without torch."""
