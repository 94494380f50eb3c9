-- Delete the table, a page of rows at a time; what tasks have claimed was deleted before.
-- KEYS[1] stream
-- Returns the page
--@include task table permissions

check_permissions(gone)
begin_writing()
local found = 0
for _, sorted in ipairs({changes, cleared}) do
  local numbered = redis.call('ZRANGE', sorted, 0, PAGE.table_rows - 1)
  delete_rows(numbered, records_of(numbered))
  in_parts('ZREM', sorted, numbered)
  found = found + (sorted == changes and #numbered or 0)
  if #numbered > 0 then
    return cmsgpack.pack({more = true, found = found})
  end
end
local names = {keys, rows, tags, changes, columns, gone, cleared, marks, task, puts, key('claims')}
for _, queue in ipairs({'#room', '#watch'}) do
  --@include waiters
  for _, waiter in ipairs(redis.call('ZRANGE', key('queue', queue), 0, PAGE.woken_at_end - 1)) do
    send_wake(waiter)
  end
  names[#names + 1], names[#names + 2] = key('queue', queue), key('needs', queue)
end
for _, name in ipairs(redis.call('HKEYS', key('claims'))) do -- bound: PAGE.claims
  for _, kind in ipairs({'claimed', 'parts', 'consumed', 'spent'}) do
    names[#names + 1] = key(kind, name)
  end
end
redis.call('UNLINK', unpack(names))
return cmsgpack.pack({more = false, found = 0})
