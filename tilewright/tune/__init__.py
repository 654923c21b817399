"""From tasks to the configs that compute them."""
