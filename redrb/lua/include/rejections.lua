-- Moves leased entries to the dead-letter stream.
--@include task groups leases dead_letters

-- Move entries to the dead-letter stream. `why` is as of add_dead_letter. Returns their number.
local function reject_held(group, slot, seqs, why)
  local rejected = {}
  for _, seq in ipairs(seqs) do
    local fields = fields_of(seq)
    if holds(group, slot, seq) and redis.call('XACK', stream, group, id_of(seq)) == 1 then
      local unread = left_unread(group, {seq}, true)
      add_dead_letter(group, seq, fields, why, why.text, unread, true)
      rejected[#rejected + 1] = seq
    end
  end
  forget(group, rejected)
  return #rejected
end
