"""Tables, figures and pages that say how runs compare."""
