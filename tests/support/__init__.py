"""What tests share; imports anything."""
