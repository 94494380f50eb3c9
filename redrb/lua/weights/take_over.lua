-- Make a publisher the owner: earlier publishers are fenced, and can commit nothing more.
-- KEYS[1] versions
-- ARGV    name
--         name: a random one
-- Returns the owner, as other scripts get it; repeated, it returns the same
--@include weights permissions

check_permissions(pins)
begin_writing()
return take_over(ARGV[1])
