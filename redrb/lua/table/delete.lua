-- Delete the table, a page of rows at a time; what tasks have claimed was deleted before.
-- KEYS[1] stream
-- Returns the page
--@include table permissions waiters

check_permissions(KEYS[1])
begin_writing()
local page, numbered = redis.call('HSCAN', rows, '0', 'COUNT', PAGE.table_rows)[2], {}
for i = 1, #page, 2 do
  numbered[#numbered + 1] = page[i]
end
delete_rows(numbered, records_of(numbered))
if redis.call('HLEN', rows) > 0 then
  return cmsgpack.pack({more = true, found = #numbered})
end
local names = {keys, rows, tags, changes, columns, gone, cleared, marks, task, puts, key('claims')}
for _, queue in ipairs({'#room', '#watch'}) do
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
return cmsgpack.pack({more = false, found = #numbered})
