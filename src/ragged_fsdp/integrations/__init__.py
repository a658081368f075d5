"""Other trainers on ragged parameters: thin adapters, each imported only when it is used."""
