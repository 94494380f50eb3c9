-- Delete dead letters of a consumer group for good; the ledger goes on counting them as dead.
-- KEYS[1] stream
-- ARGV    group, seq ...
-- Returns the number of letters deleted.
--@include task dead_letters permissions

check_permissions(stream)
begin_writing()
local dropped = 0
for i = 2, exists() and #ARGV or 1 do
  local id = letter_id(ARGV[1], ARGV[i])
  dropped = dropped + (id and delete_letter(id, ARGV[1]) or 0)
end
add(task, 'dead_dropped', dropped)
return dropped
