-- Do the work that a change of settings leaves, a page at a time: fill an index that the task was given
-- later, give groups of a random order new places, delete dead letters.
-- KEYS[1] stream
-- Returns the page
--@include task filling sorting dead_letters permissions

check_permissions(KEYS[1])
begin_writing()
local more = fill_indexes() or sort_groups()
if not more and redis.call('HEXISTS', task, 'shedding') == 1 then
  more = trim_letters()
  if not more then
    redis.call('HDEL', task, 'shedding')
  end
end
return cmsgpack.pack({more = more})
