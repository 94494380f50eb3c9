-- Add a part of a saved task to its restore area: the transaction has just added the entries or dead letters.
-- Parts are numbered from 1 and come in order; a repeated part changes nothing.
-- KEYS[1] stream of the restore area
-- ARGV    the call `AddToArea` of redrb/stream/saving/calls.py. Its value, by kind:
--         task       {task = {field = value}, puts = {field = value},
--                    groups = {name = {state = {}, staleness = {}}}}
--         entries    a list of {seq, size, facts, needs}; needs is a list of
--                    {consumer group, status it was moved to or '', rule it expired by or '',
--                    failed deliveries, reads}
--         dead       a list of {consumer group, seq, id, source} of the dead letters that the transaction
--                    adds
--         puts       {producer = its last put}
--         sources    {origin, row, {id there = record}}: of forwarded groups, include/sources.lua
--         refreshed  {status = its last refresh}
--         end        {last id of the task, id of the last entry}
-- Returns its reply
--@include task facts settings pools ledger restore_area permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local part, kind, value = ask.part, ask.kind, ask.value
if not exists() and part > 1 then
  redis.call('UNLINK', stream, key('dead'))
  return cmsgpack.pack('gone')
end
if number(task, 'part') >= part then
  return cmsgpack.pack('again')
end

local function fill(name, fields)
  for field, content in pairs(fields) do
    redis.call('HSET', name, field, content)
  end
end

local function begin()
  redis.call('XADD', stream, BASE .. '0', 'g', '')
  redis.call('XDEL', stream, BASE .. '0')
  fill(task, value.task)
  fill(puts, value.puts)
  pack_rules()
  redis.call('HDEL', task, 'floor') -- the entries that it is about are not saved
  for group, saved in pairs(value.groups) do
    redis.call('SADD', key('groups'), group)
    redis.call('XGROUP', 'CREATE', stream, group, '0')
    begin_ledger(group)
    for name, count in pairs(saved.state) do
      redis.call('HINCRBY', key('group', group), name, count)
    end
    fill(key('staleness', group), saved.staleness)
  end
end

-- Groups that wait for consumer groups: consumer group -> pool -> {members, their facts}.
local waiting = {}
local function wait(group, member, facts)
  local pool = home_of(group, member, facts)
  waiting[group] = waiting[group] or {}
  waiting[group][pool] = waiting[group][pool] or {{}, {}}
  table.insert(waiting[group][pool][1], member)
  table.insert(waiting[group][pool][2], facts)
end

local function restore_need(member, facts, need)
  local group = need[1]
  for name, text in pairs({moved = need[2], expiries = need[3]}) do
    if text ~= '' then
      redis.call('HSET', key(name, group), member, text)
    end
  end
  if need[4] > 0 then
    redis.call('HSET', key('deliveries', group), member, need[4])
  end
  if need[5] > 0 then
    redis.call('HSET', key('reads', group), member, need[5])
  end
  wait(group, member, facts)
end

local function restore_entries()
  local sized, since, bytes = number(task, 'max_bytes') > 0, number(task, 'sized_after'), 0
  for _, entry in ipairs(value) do
    local seq, size, facts = entry[1], entry[2], entry[3]
    local member = member_of(seq)
    facts.status = facts.status or 'completed'
    store_facts(member, facts)
    if sized and seq > since then
      bytes = bytes + size
    end
    for _, need in ipairs(entry[4]) do
      restore_need(member, facts, need)
    end
  end
  add(task, 'bytes', bytes)
  for group, pools in pairs(waiting) do
    for pool, found in pairs(pools) do
      enter(group, pool, found[1], found[2])
    end
  end
end

if kind == 'task' then
  begin()
elseif kind == 'entries' then
  restore_entries()
elseif kind == 'dead' then
  for _, letter in ipairs(value) do
    if redis.call('SISMEMBER', key('groups'), letter[1]) == 1 then
      redis.call('ZADD', key('letters', letter[1]), letter[2], letter[3])
      redis.call('ZADD', key('buried'), letter[4], letter[3])
    end
  end
elseif kind == 'end' and value[1] > value[2] then -- ids count on from where they were
  redis.call('XADD', stream, id_of(value[1]), 'g', '')
  redis.call('XDEL', stream, id_of(value[1]))
elseif kind == 'sources' then
  redis.call('HSET', key('sources'), value[1], value[2])
  fill(key('sources', value[1]), value[3])
elseif kind == 'puts' or kind == 'refreshed' then
  fill(key(kind), value)
end
redis.call('HSET', task, 'part', part)
local expires = string.format('%.0f', server_ms() + ask.ttl_ms)
for _, name in ipairs(names_of_keys()) do -- all at the same moment
  redis.call('PEXPIREAT', prefix .. name, expires)
end
return cmsgpack.pack('ok')
