"""Everything that deploys: the runtime kit that services share, and the local stack."""
