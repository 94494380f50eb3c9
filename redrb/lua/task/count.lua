-- Count the groups that wait in one status, for one consumer group: a page. Writes nothing.
-- KEYS[1] stream
-- ARGV    the call `Count` of redrb/stream/task/calls.py
-- Returns its reply
--@include task facts where

local ask = cmsgpack.unpack(ARGV[1])
local group, status, where = ask.group, ask.status, ask.where
local pool, found, query = pool_of(group, status), 0, nil
local joined = redis.call('SISMEMBER', key('groups'), group) == 1
if not exists() then
  return cmsgpack.pack({found = 0})
elseif where ~= '' then
  query = read_query(where)
end
if joined and not query then
  return cmsgpack.pack({found = redis.call('ZCARD', key('ready', pool))})
elseif joined then
  --@include looking
  local place = look_behind(pool, ask.place, PAGE.matched, function(_, facts)
    found = found + (satisfies(query, facts) and 1 or 0)
  end)
  return cmsgpack.pack({found = found, place = place})
end

local page = redis.call('HSCAN', key('facts'), ask.place, 'COUNT', PAGE.matched)
for i = 1, #page[2], 2 do
  local facts = unpack_facts(page[2][i + 1])
  if facts.status == status and (not query or satisfies(query, facts)) then
    found = found + 1
  end
end
return cmsgpack.pack({found = found, place = page[1]})
