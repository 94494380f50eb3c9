-- Delete dead letters of a consumer group for good; the ledger goes on counting them as dead.
-- KEYS[1] stream
-- ARGV    group, seq ...
-- Returns the number of letters deleted.
--@include task dead_letters permissions

check_permissions(stream)
begin_writing()
local found = {}
for i = 2, exists() and #ARGV or 1 do
  found[#found + 1] = letter_of(ARGV[1], ARGV[i])
end
return delete_letters(found)
