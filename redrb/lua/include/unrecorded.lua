-- Entries of the stream beyond the last id that the task counts. Failed puts leave them, and nothing else
-- names them; if anything does, they are groups, and the record of the last id is wrong.
--@include task put_record facts pending

-- The bytes of an entry.
local function size_of(entry)
  local bytes = 0
  for _, value in ipairs(entry[2]) do -- bound: fields of an entry
    bytes = bytes + #value
  end
  return bytes
end

-- The first of the entries beyond `last` up to the id `to`, and whether there may be more. They are read one
-- by one, since each may be large.
local function entries_beyond(last, to)
  local seqs, after, read = {}, id_of(last), 0
  while #seqs < PAGE.orphans and read < PAGE.copied_bytes do -- bound: PAGE.orphans
    local entry = redis.call('XRANGE', stream, '(' .. after, to, 'COUNT', 1)[1]
    if not entry then
      return seqs, false
    end
    seqs[#seqs + 1], after = seq_of(entry[1]), entry[1]
    read = read + size_of(entry)
  end
  return seqs, true
end

-- How many of the entries are groups: they have facts, wait, or are leased.
local function groups_among(seqs)
  local members, known, count = {}, {}, 0
  local function note(replies)
    for i = 1, #seqs do
      known[i] = known[i] or replies[i]
    end
  end
  for i, seq in ipairs(seqs) do
    members[i] = member_of(seq)
  end
  if #seqs > 0 then
    note(replies_of('HMGET', key('facts'), members))
    for group in pairs(by_name(redis.call('XINFO', 'GROUPS', stream))) do -- bound: consumer groups
      for _, status in ipairs(STATUSES) do
        note(replies_of('ZMSCORE', key('ready', pool_of(group, status)), members))
      end
      local leased = leased_among(group, seqs)
      for i, seq in ipairs(seqs) do
        known[i] = known[i] or leased[seq]
      end
    end
  end
  for i = 1, #seqs do
    count = count + (known[i] and 1 or 0)
  end
  return count
end

-- The last id that the stream has given: the task counts it, unless a put has failed since; nil without a
-- stream.
local function last_given()
  local info = redis.pcall('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      return seq_of(info[i + 1])
    end
  end
end

-- Why the record of puts is unusable, as refuse_puts takes it, or nil; then how many entries failed puts have
-- left, a page at most, and whether there may be more.
local function fault_of_puts()
  local last = redis.call('HGET', puts, 'last')
  if not last then
    return 'is lost'
  end
  for _, text in ipairs(redis.call('HMGET', puts, unpack(PUT_COUNTERS))) do
    if text and not counter(text) then
      return 'is damaged'
    end
  end
  if counter(last) > (last_given() or 0) then
    return 'counts groups that the stream has never had'
  end
  local orphans, more = entries_beyond(counter(last), '+')
  if groups_among(orphans) > 0 then
    return 'does not count all groups'
  end
  return nil, #orphans, more
end

-- What is stored of a task whose settings are lost: entries of the stream, and other keys of the task.
local function left_without_settings()
  if exists() then
    return 0
  end
  return redis.call('XLEN', stream) + redis.call('EXISTS', key('facts'), key('groups'), key('dead'))
end

-- Refuse to take a task for a new one that has lost its settings.
local function refuse_lost_settings()
  if left_without_settings() > 0 then
    error('the key ' .. task .. ' is lost, with the settings of groups that are stored; nothing was changed: '
      .. 'run `redrb doctor TASK --repair`, after which processes can give the settings again', 0)
  end
end

-- Refuse a task whose record of puts is unusable, at its first use by a process.
local function check_puts()
  local fault = exists() and fault_of_puts()
  if fault then
    refuse_puts(fault)
  end
end
