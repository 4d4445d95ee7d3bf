"""Models: farandole's own, those of Hugging Face, a user's; their stages, and text from them."""
