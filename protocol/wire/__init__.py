"""What every message is made of: errors, identities, frames, schemas, records, limits."""
