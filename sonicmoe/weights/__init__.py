"""The user's expert parameters and the copies that engines read instead of them."""
