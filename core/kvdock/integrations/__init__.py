"""kvdock inside other projects. Each module imports the project it is for; `kvdock` itself imports none of them."""
