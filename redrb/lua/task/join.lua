-- Register a consumer group: from now on no entry is deleted before the group is done with it.
-- KEYS[1] stream
-- ARGV    group, start
--         start: '' for all stored groups, '+' for groups put later, or a seq: stored groups from it
--         on, history included
-- Returns 'joined' | 'more': run it again | 'gone'
--@include task membership permissions

check_permissions(KEYS[1])
begin_writing()
if not exists() then
  return 'gone'
end
local start = ARGV[2] == '+' and math.huge or tonumber(ARGV[2])
return join(ARGV[1], start) and 'joined' or 'more'
