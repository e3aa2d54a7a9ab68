"""Episodes of several turns as samples: tokens in, tokens out, and what the model did not say masked from the loss."""
